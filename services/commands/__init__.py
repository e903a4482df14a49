"""The `rollart` commands, one module per group. Put together by `services.cli`; heavy imports wait inside."""
