"""What a model needs beyond its row: functions that rows name, and subclasses where several steps differ."""
