"""Clients of BufferService by role, over one connection.

| module   | role             | asks                                                     |
|----------|------------------|----------------------------------------------------------|
| tasks    | a submitter      | submit, cancel, read, wait; statistics; recipes          |
| worker   | a rollout worker | lease, renew, complete, reject, return                   |
| trainer  | rank 0           | register, take, fetch, commit; its tasks and its recipe  |
| admin    | a person         | dead letters                                             |
"""
