"""Moving work from hot devices to cold ones: BanaServe's policy, and how plans are carried out."""
