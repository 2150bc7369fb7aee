"""One rank's forward pass: flat batch arrays, the model runner, captured decode steps, layers of a drafter's KV."""
