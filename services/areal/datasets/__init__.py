"""Datasets: files and generators."""
