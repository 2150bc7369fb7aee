"""The controller of the ratio: looks at how pressed prefill and decode are, and changes how many there are of each."""
