"""The alphabet of byte-level BPE: each byte written as one printable character.

The rule is GPT-2's: a byte that prints in Latin-1 is written as itself, the others take the
characters from U+0100 on, in order.
"""

_PRINTABLE = frozenset([*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)])
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]

BYTE_OF_CHARACTER: dict[str, int] = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + rank): byte for rank, byte in enumerate(_OTHERS)
}
