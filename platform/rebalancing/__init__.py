"""Moving work from hot devices to cold ones: BanaServe's policy and its protocol, without hands."""
