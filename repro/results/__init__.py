"""Records on disk (`store`), made of the ranks' results (`record`) and viewed (`frame`)."""
