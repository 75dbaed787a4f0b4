"""One row through a recipe's workflow and reward, with a fake policy: `areal check`."""
