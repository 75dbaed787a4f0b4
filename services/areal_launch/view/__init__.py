"""What a person sees of a run: live view, lines, summary, plots."""
