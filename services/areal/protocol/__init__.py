"""What crosses the wire: messages to and from our types."""
