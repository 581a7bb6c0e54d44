"""What the compilers of one platform want: XLA for CPU, GPU and TPU."""
