"""The parts that an address of `embedded` or `local` stands for: Kafka and Redis on this machine.

Called by the launcher and by tests; services only ever see addresses.
"""
