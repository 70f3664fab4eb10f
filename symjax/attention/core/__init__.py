"""Code that mechanisms and kernels share, such as checks, masks and mesh axes."""
