"""What goes over the wire: bodies of requests and answers, in OpenAI's shapes."""
