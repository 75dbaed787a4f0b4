"""HTTP for people and programs: the task API as REST, the state of a run, the dashboard.

Owns: nothing; it asks the other services and remembers the last minutes for the page.
Never: queues, scores or trains, or keeps anything that a restart could lose.

Core: `status.py`
"""
