"""Where a stack can run besides this machine: Slurm, Ray, Kubernetes."""
