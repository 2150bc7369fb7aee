"""One rank's forward pass: the batch as flat arrays, the memory it takes, the check of the way it runs."""
