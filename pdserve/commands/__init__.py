"""The commands of `pdserve`, a module each with `main(argv) -> exit status`."""
