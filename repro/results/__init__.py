"""Records on disk (``store``), how they are made of the ranks' results (``record``) and viewed (``frame``)."""
