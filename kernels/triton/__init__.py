"""The kernel contract in Triton, for NVIDIA GPUs, and AMD's where Triton compiles it. The CPU path imports none
of it."""
