"""SIMT shim: runs the library's CUDA sources on the CPU (see docs/simt.md)."""
