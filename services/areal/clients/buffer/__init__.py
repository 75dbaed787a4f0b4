"""BufferService by role: each user takes what its role asks, over one connection.

| module   | role             | asks                                                     |
|----------|------------------|----------------------------------------------------------|
| tasks    | a submitter      | submit, cancel, read, wait for an end, statistics        |
| worker   | a rollout worker | lease, renew, complete, reject, return                   |
| trainer  | rank 0           | register, take, fetch, commit; its tasks and its recipe  |
| recipes  | both             | store a recipe, fetch it                                 |
| admin    | a person         | dead letters                                             |
"""
