"""What every service's process has: gRPC with health and reflection, /metrics, drain on SIGTERM."""

import os

# Read by gRPC when it is imported, so before that: its fork handlers abort, now and then, a process
# that a service starts (workers, boxes). Nothing here calls gRPC in a forked child.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
