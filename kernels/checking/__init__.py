"""Behind `kernels.checked_interpreter`: the memory of a launch, and the builder that watches it."""
