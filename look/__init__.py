"""Looking at runs and planning them: a training loop imports these only inside the `if` of a knob."""
