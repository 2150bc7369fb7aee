"""What goes over the wire between block servers and readers, and the streams it goes over."""
