"""Records of decisions in memory and in files, with endpoint states and configurations."""
