"""What a run leaves in its folder, for those who write it and those who read it. No torch here.

The trainer writes checkpoints, rows of steps, evaluations and kept rollouts. The command, the
gateway and the live view read them.
"""
