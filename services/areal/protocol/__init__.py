"""Converts between protobuf messages and our types."""
