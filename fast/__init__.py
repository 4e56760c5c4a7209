"""Speed-ups: each does what plain code in the root, in vLLM or in torch does, sooner. A training loop imports these only inside the `if` of a knob."""
