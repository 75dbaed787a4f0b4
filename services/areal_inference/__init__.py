"""CPU inference engine that speaks SGLang's HTTP protocol.

Owns: one set of policy weights, the KV cache of the requests it is generating, nothing durable.
Never: decides which policy version to serve (weight-sync does), keeps a request over a restart.

Core: `decode/scheduler.py`
"""
