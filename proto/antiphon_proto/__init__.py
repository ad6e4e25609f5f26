"""What processes say to each other: `worker.proto` and the code generated from it (`make proto`); nothing else."""
