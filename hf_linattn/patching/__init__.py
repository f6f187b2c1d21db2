"""Install attention in a model, take it off again, save, load and describe."""
