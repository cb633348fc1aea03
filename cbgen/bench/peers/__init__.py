"""Scripts that drive one engine each; they run as plain files, most of them in other interpreters."""
