"""What compiling kernels ahead of time costs, and what it saves a process that loads them."""
