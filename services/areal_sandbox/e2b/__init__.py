"""The boxes as E2B's SDK expects them: its REST API, and envd's calls over Connect in JSON."""
