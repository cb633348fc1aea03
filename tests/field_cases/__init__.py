"""Field cases: failures reported for this kind of job, as small inputs with the right answer; see README.md here."""
