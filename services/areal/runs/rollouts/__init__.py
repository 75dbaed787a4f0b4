"""Keeps what was trained on as Parquet: one row per trajectory."""
