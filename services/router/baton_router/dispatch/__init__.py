"""From a placed request to its last token, over as many instances as it takes."""
