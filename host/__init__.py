"""A rank as a process, the workers, the disk, the console, names that users write: nothing here knows of training."""
