"""An engine at the other end of a line of messages: client, transports, session, worker, supervisor."""
