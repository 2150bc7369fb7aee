"""OpenAI's files and batches: where they are kept, the endpoints, and what runs the lines in idle capacity."""
