"""What was trained on, kept as Parquet: a row per trajectory."""
