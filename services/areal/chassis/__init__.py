"""The process every service is: gRPC with health and reflection, /metrics, drain on SIGTERM."""

from areal.chassis.service import Service, ServiceContext, run_service

__all__ = ["Service", "ServiceContext", "run_service"]
