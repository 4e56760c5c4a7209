"""What is trained on: rules that judge, tools that a policy calls, chat templates, and makers of models and data."""
