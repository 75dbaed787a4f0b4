"""From requests to tokens: scheduler, runner, sampling."""
