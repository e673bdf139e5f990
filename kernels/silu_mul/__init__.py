"""The gated activation of the MLP: silu(gate) * up from one fused matrix."""
