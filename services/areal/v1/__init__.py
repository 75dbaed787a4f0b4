"""GENERATED from proto/areal/v1 by tools/gen_proto.py; do not edit."""
