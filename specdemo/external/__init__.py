"""Other engines: steps from the counts of servers, and statistics of logs."""
