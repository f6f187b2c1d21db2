"""Attention by kernels in C++ on CPUs, compiled on the machine."""
