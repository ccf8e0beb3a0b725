"""Set-up, page and tests on fresh Debian and Ubuntu systems in chroots: `make test-machines`, as root."""
