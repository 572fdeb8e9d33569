typedef int we_not_this_platform;
