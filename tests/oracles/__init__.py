"""What tests compare with: slow, plain, and written without the code that they judge."""
